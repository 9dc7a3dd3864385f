"""The system calls that sandboxed programs are denied, as a filter for bubblewrap's `--seccomp`.

Compilers and numeric workers need none of them; they lead to other processes' memory, to new namespaces, to kernel
interfaces with a history of bugs, or to the machine's clock. A denied call fails with EPERM and the program goes on.
The filter is the second line: namespaces, an own user and an empty view of the file system come first.

Written for x86-64 only, the one architecture of the CPU target; elsewhere there is no filter. Numbers are those of the
kernel's `arch/x86/entry/syscalls/syscall_64.tbl`; the program is classic BPF as in seccomp(2).
"""

from __future__ import annotations

import errno
import platform
import struct

__all__ = ["DENIED", "program"]

DENIED = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440, "kcmp": 312,
    "pidfd_getfd": 438, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
    "move_mount": 429, "open_tree": 428, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "add_key": 248, "request_key": 249, "keyctl": 250, "kexec_load": 246,
    "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176, "swapon": 167,
    "swapoff": 168, "reboot": 169, "acct": 163, "quotactl": 179, "open_by_handle_at": 304, "name_to_handle_at": 303,
    "lookup_dcookie": 212, "personality": 135, "modify_ldt": 154, "iopl": 172, "ioperm": 173, "settimeofday": 164,
    "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "sethostname": 170, "setdomainname": 171,
    "syslog": 103, "memfd_secret": 447, "fanotify_init": 300, "vhangup": 153,
}  # fmt: skip
"""Name to x86-64 number."""

_CLONE, _CLONE3 = 56, 435
_NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET of clone(2)."""
_AUDIT_ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data."""


def program() -> bytes | None:
    """The filter's instructions, or None on an architecture without one."""
    if platform.machine() != "x86_64":
        return None
    code = [
        _step(_LOAD, _ARCH),
        _step(_JUMP_EQUAL, _AUDIT_ARCH_X86_64, 1, 0),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER),
        _step(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1),
        _step(_RETURN, _ERRNO | errno.EPERM),
    ]
    for number in sorted(DENIED.values()):
        code += [_step(_JUMP_EQUAL, number, 0, 1), _step(_RETURN, _ERRNO | errno.EPERM)]
    code += [
        # The flags of clone3 lie in memory, out of the filter's sight; ENOSYS makes libc use clone.
        _step(_JUMP_EQUAL, _CLONE3, 0, 1),
        _step(_RETURN, _ERRNO | errno.ENOSYS),
        _step(_JUMP_EQUAL, _CLONE, 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_JUMP_ANY_BIT, _NAMESPACE_FLAGS, 0, 1),
        _step(_RETURN, _ERRNO | errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One struct sock_filter; jump distances count from the next instruction."""
    return struct.pack("<HBBI", operation, if_true, if_false, value)
