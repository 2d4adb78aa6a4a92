"""The XID errors of NVIDIA's driver, with the descriptions that NVIDIA documents.

https://docs.nvidia.com/deploy/xid-errors lists all of them. To add one, add a line to one of the two tables: those in
APPLICATION_XIDS do not make a card unhealthy by default (`nodePlugin.health.ignoredXids`), all others do. An XID in
neither table counts too; it is only reported without a description.
"""

# Caused by the program that runs on the card: a restart of the program is the remedy, and the card is intact.
APPLICATION_XIDS = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",  # the driver terminated one channel; other programs continue
    45: "preemptive cleanup, due to previous errors",  # follows a kill or another XID
    68: "NVDEC0 exception",  # the video decoder
    109: "context switch timeout",
}

# Caused by the card, its memory, its links or its firmware: containers on it cannot be expected to work.
HARDWARE_XIDS = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "ECC page retirement or row remapping",
    64: "ECC page retirement or row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
}

# After these the card does not work until it is reset or the machine is rebooted, however well it answers.
RESET_XIDS = frozenset({46, 48, 61, 62, 64, 74, 79, 95, 119, 120, 140})

DESCRIPTIONS = APPLICATION_XIDS | HARDWARE_XIDS


def describe_xid(xid: int) -> str:
    """Return the text for events and logs, such as "XID 79: GPU has fallen off the bus"."""
    description = DESCRIPTIONS.get(xid)
    return f"XID {xid}: {description}" if description else f"XID {xid}"
