"""Carries TCP connections from one network namespace into another.

A socket belongs to the namespace its process is in when it is made: bind in one, move over, connect in the
other. It ends when its lifeline, a pipe held by whoever started it, breaks.
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


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction until it ends, then end it on the other side."""
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.close()


async def serve(listener: socket.socket, target: tuple[str, int], lifeline: int) -> None:
    """Accept and forward until the lifeline breaks."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(lifeline, ended.set)
    await asyncio.start_server(accepted, sock=listener)
    await ended.wait()


def main(listen_in: str, listen_at: str, connect_in: str, connect_to: str, lifeline: str) -> None:
    """Bind in the first namespace, say which port it is, and serve from the second."""
    move_to(listen_in)
    host, port = listen_at.rsplit(":", 1)
    listener = socket.create_server((host, int(port)))
    move_to(connect_in)
    target, target_port = connect_to.rsplit(":", 1)
    print(listener.getsockname()[1], flush=True)
    asyncio.run(serve(listener, (target, int(target_port)), int(lifeline)))


if __name__ == "__main__":
    main(*sys.argv[1:6])
