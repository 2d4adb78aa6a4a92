"""Forwards TCP connections from one network namespace into another.

A socket belongs to the namespace in which its process was when it created the socket. So this process listens in one
namespace, moves to the other, and connects from there. It ends when its lifeline, a pipe from its parent, is closed.
"""

import asyncio
import ctypes
import os
import socket
import sys
from contextlib import suppress

CLONE_NEWNET = 0x40000000
CHUNK = 1 << 18


def move_to(namespace: str) -> None:
    """Move this process into a network namespace."""
    handle = os.open(namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(handle)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy data in one direction until it ends, then close the other side."""
    with suppress(OSError):
        # asyncio does so for connections it makes, not for those it accepts here: each answer of more than one segment
        # waited 40 ms for an acknowledgement.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.close()


async def serve(listener: socket.socket, target: tuple[str, int], lifeline: int) -> None:
    """Forward connections until the lifeline is closed."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target_reader, target_writer = await asyncio.open_connection(*target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, target_writer), copy(target_reader, writer))

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(lifeline, ended.set)
    await asyncio.start_server(forward, sock=listener)
    await ended.wait()


def main(listen_in: str, listen_at: str, connect_in: str, connect_to: str, lifeline: str) -> None:
    """Listen in the first namespace, print the port, and connect from the second."""
    move_to(listen_in)
    host, port = listen_at.rsplit(":", 1)
    listener = socket.create_server((host, int(port)))
    move_to(connect_in)
    target, target_port = connect_to.rsplit(":", 1)
    print(listener.getsockname()[1], flush=True)
    asyncio.run(serve(listener, (target, int(target_port)), int(lifeline)))


if __name__ == "__main__":
    main(*sys.argv[1:6])
