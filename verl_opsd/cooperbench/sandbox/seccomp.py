"""A system call filter for what no namespace closes: user namespaces (inside one a command would be root over mounts of its
own), sockets that are not the network namespace's (AF_VSOCK reaches the hypervisor), and the kernel's keys (the user's key ring
outlives its sandbox, and the next one with its user id would read it).

Where no memory control group exists, a tmpfs of its own would also hold memory that no limit counts. The filter is a
classic BPF program (linux/seccomp.h, linux/filter.h) that ``bwrap --seccomp`` loads just before it starts the command.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

from verl_opsd.errors import OpsdError

CLONE_NEWUSER = 0x10000000
#: Socket families that a network namespace isolates.
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
X32_BIT = 0x40000000  # x86-64 only: the same calls under other numbers
ARCH_OFFSET, NUMBER_OFFSET, FIRST_ARGUMENT_OFFSET = 4, 0, 16  # of struct seccomp_data; both machines are little-endian
LOAD, JUMP_EQ, JUMP_GE, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
IO_URING_SETUP = 425  # on every machine
# AUDIT_ARCH_* and the numbers of clone, unshare, setns, clone3, socket, socketpair, add_key, request_key, keyctl
MACHINES = {
    "x86_64": (0xC000003E, 56, 272, 308, 435, 41, 53, 248, 249, 250),
    "aarch64": (0xC00000B7, 220, 97, 268, 435, 198, 199, 217, 218, 219),
}


def call_filter() -> bytes:
    """The filter for this machine. ``clone3`` gives ENOSYS (a filter can't read its flags; the C library then takes
    ``clone``), and so does io_uring, whose calls no filter sees; a user namespace, ``setns``, keys and calls of another
    architecture give EPERM; a socket of another family than ``FAMILIES`` gives EAFNOSUPPORT.

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
    arch, clone, unshare, setns, clone3, open_socket, socketpair, *keys = MACHINES[machine]
    # (operation, operand, label to go to when true, when false; none: the next instruction), labels by position
    program: list[tuple[int, int, str, str]] = [
        (LOAD, ARCH_OFFSET, "", ""),
        (JUMP_EQ, arch, "", "denied"),
        (LOAD, NUMBER_OFFSET, "", ""),
        (JUMP_GE, X32_BIT, "denied", ""),
        *((JUMP_EQ, call, "absent", "") for call in (clone3, IO_URING_SETUP)),
        *((JUMP_EQ, call, "denied", "") for call in (setns, *keys)),
        *((JUMP_EQ, call, "namespaces", "") for call in (unshare, clone)),
        *((JUMP_EQ, call, "family", "") for call in (open_socket, socketpair)),
        (RETURN, ALLOW, "", ""),
    ]
    labels = {"namespaces": len(program)}
    program += [(LOAD, FIRST_ARGUMENT_OFFSET, "", ""), (JUMP_SET, CLONE_NEWUSER, "denied", "allowed")]
    labels["family"] = len(program)
    program += [(LOAD, FIRST_ARGUMENT_OFFSET, "", ""), *((JUMP_EQ, family, "allowed", "") for family in FAMILIES)]
    program += [(RETURN, ERRNO | errno.EAFNOSUPPORT, "", "")]
    for label, value in (("denied", ERRNO | errno.EPERM), ("absent", ERRNO | errno.ENOSYS), ("allowed", ALLOW)):
        labels[label] = len(program)
        program.append((RETURN, value, "", ""))

    def skip(label: str, here: int) -> int:
        return labels[label] - here - 1 if label else 0

    return b"".join(
        struct.pack("=HBBI", operation, skip(true, here), skip(false, here), operand)
        for here, (operation, operand, true, false) in enumerate(program)
    )
