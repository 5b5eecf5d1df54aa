"""A system call filter that closes user namespaces: inside one a command would be root over mounts of its own.

Where no memory control group exists, a tmpfs of its own would also hold memory that no limit counts. The filter is a
classic BPF program (linux/seccomp.h, linux/filter.h) that ``bwrap --seccomp`` loads just before it starts the command.
"""

from __future__ import annotations

import errno
import platform
import struct

from verl_opsd.errors import OpsdError

CLONE_NEWUSER = 0x10000000
X32_BIT = 0x40000000  # x86-64 only: the same calls under other numbers
ARCH_OFFSET, NUMBER_OFFSET, FIRST_ARGUMENT_OFFSET = 4, 0, 16  # of struct seccomp_data; both machines are little-endian
LOAD, JUMP_EQ, JUMP_GE, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
IO_URING_SETUP = 425  # on every machine
# AUDIT_ARCH_* and the numbers of clone, unshare, setns, clone3
MACHINES = {"x86_64": (0xC000003E, 56, 272, 308, 435), "aarch64": (0xC00000B7, 220, 97, 268, 435)}


def no_user_namespaces() -> bytes:
    """The filter for this machine. ``clone3`` gives ENOSYS (a filter can't read its flags; the C library then takes
    ``clone``), and so does io_uring, whose calls no filter sees; a user namespace, ``setns`` and calls of another architecture give EPERM.

    Raises:
        OpsdError: a machine other than x86-64 and arm64.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        raise OpsdError(
            f"the bubblewrap sandbox on a {machine} machine",
            "its system call filter is written for " + " and ".join(MACHINES),
            "run on one of these",
        )
    arch, clone, unshare, setns, clone3 = MACHINES[machine]
    # (operation, operand, instructions to skip when true, when false)
    program = [
        (LOAD, ARCH_OFFSET, 0, 0),
        (JUMP_EQ, arch, 0, 10),
        (LOAD, NUMBER_OFFSET, 0, 0),
        (JUMP_GE, X32_BIT, 8, 0),
        (JUMP_EQ, clone3, 9, 0),
        (JUMP_EQ, IO_URING_SETUP, 8, 0),
        (JUMP_EQ, setns, 5, 0),
        (JUMP_EQ, unshare, 1, 0),
        (JUMP_EQ, clone, 0, 4),
        (LOAD, FIRST_ARGUMENT_OFFSET, 0, 0),
        (JUMP_SET, CLONE_NEWUSER, 1, 0),
        (RETURN, ALLOW, 0, 0),
        (RETURN, ERRNO | errno.EPERM, 0, 0),
        (RETURN, ALLOW, 0, 0),
        (RETURN, ERRNO | errno.ENOSYS, 0, 0),
    ]
    return b"".join(struct.pack("=HBBI", operation, true, false, operand) for operation, operand, true, false in program)
