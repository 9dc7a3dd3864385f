"""The vocabulary of the C++ rules: what files under the editable paths may name.

Lists of names can only inform: compiled objects are held to an exact list of symbols by the audit gate, and behaviour
is tested by the kernels gate. Words are chosen from what the allowed headers make visible and from what a declaration
by hand would name.
"""

from __future__ import annotations

import re

__all__ = [
    "ATTRIBUTES", "CALLED_WORDS", "DIRECTIVES", "KEYWORDS", "PRAGMAS", "PROTECTED_MACROS", "forbidden_identifier",
]  # fmt: skip

DIRECTIVES = frozenset(
    {"", "define", "undef", "if", "ifdef", "ifndef", "elif", "else", "endif", "include", "pragma", "error"}
)

PRAGMAS = (re.compile(r"once"), re.compile(r"GCC ivdep"), re.compile(r"GCC unroll (?:[0-9]+|[A-Za-z_][A-Za-z0-9_]*)"))
"""Loop hints and include guards. Others change code generation behind the pinned flags, or hide diagnostics."""

ATTRIBUTES = frozenset({
    "always_inline", "noinline", "aligned", "may_alias", "vector_size", "hot", "cold", "pure", "const", "unused",
    "nonnull", "flatten", "assume_aligned", "alloc_size", "fallthrough", "likely", "unlikely", "nodiscard",
    "maybe_unused", "no_unique_address", "noreturn", "packed", "returns_nonnull", "artificial",
})  # fmt: skip
"""Attributes (GNU or standard, without underscores) that neither run code at load time, nor move symbols or sections,
nor change the instruction set or the optimisation level."""

KEYWORDS = frozenset({
    "alignas", "alignof", "asm", "auto", "bool", "break", "case", "catch", "char", "class", "const", "constexpr",
    "constinit", "consteval", "continue", "decltype", "default", "delete", "do", "double", "else", "enum",
    "explicit", "export", "extern", "false", "float", "for", "friend", "goto", "if", "inline", "int", "long",
    "mutable", "namespace", "new", "noexcept", "nullptr", "operator", "private", "protected", "public", "register",
    "requires", "return", "short", "signed", "sizeof", "static", "struct", "switch", "template", "this",
    "thread_local", "throw", "true", "try", "typedef", "typeid", "typename", "union", "unsigned", "using",
    "virtual", "void", "volatile", "while",
})  # fmt: skip

PROTECTED_MACROS = re.compile(r"K3_(?:EXPORT|ABI_VERSION|SCRATCH_BYTES|CONTEXT)|NDEBUG|TVM_.*|_[A-Z_].*|.*__.*")
"""Macro names that candidates may not define or undefine: the calling convention's and reserved ones."""

_ASM = {"asm", "__asm", "__asm__"}
_STORAGE = {"thread_local", "__thread", "_Thread_local"}
_MODULES = {"export", "co_await", "co_yield", "co_return"}
_REPRODUCIBILITY = {
    "__DATE__",
    "__TIME__",
    "__TIMESTAMP__",
    "__BASE_FILE__",
    "__COUNTER__",
    "__has_include",
    "__has_embed",
    "__has_include_next",
}
_NAMES = {
    # processes, environment, exit, files: what <stdlib.h> and <stdio.h> make visible through allowed headers
    "system", "getenv", "secure_getenv", "setenv", "putenv", "unsetenv", "clearenv", "environ", "__environ",
    "atexit", "at_quick_exit", "on_exit", "quick_exit", "_Exit", "_exit", "abort", "exit", "__cxa_atexit",
    "__libc_start_main", "mkstemp", "mkostemp", "mkstemps", "mkdtemp", "mktemp", "tmpfile", "tmpnam", "realpath",
    "getloadavg", "posix_openpt", "grantpt", "unlockpt", "ptsname", "getpt", "fopen", "freopen", "fdopen",
    "fopen64", "popen", "pclose", "printf", "fprintf", "vprintf", "vfprintf", "dprintf", "puts", "fputs", "putchar",
    "fputc", "fwrite", "fread", "fgets", "scanf", "fscanf", "perror", "stdin", "stdout", "stderr", "getline",
    "fork", "vfork", "execve", "execv", "execvp", "execl", "execlp", "execle", "execvpe", "fexecve", "posix_spawn",
    "posix_spawnp", "syscall", "_start", "__libc_system",
    # memory that outlives a call
    "malloc", "calloc", "realloc", "free", "posix_memalign", "aligned_alloc", "memalign", "valloc", "pvalloc",
    "_mm_malloc", "_mm_free", "mmap64", "mprotect", "mremap", "munmap", "shm_open", "memfd_create", "brk", "sbrk",
    "process_vm_readv", "process_vm_writev", "ptrace", "prctl", "arch_prctl", "personality",
    # clocks, counters, random
    "clock_gettime", "clock_gettime64", "gettimeofday", "timespec_get", "nanosleep", "usleep", "rand", "srand",
    "random", "srandom", "drand48", "arc4random", "getrandom", "getentropy", "chrono",
    # threads, signals, non-local control
    "longjmp", "_longjmp", "siglongjmp", "setjmp", "_setjmp", "sigsetjmp", "makecontext", "swapcontext",
    "setcontext", "getcontext", "sigaction", "sigaltstack", "sigprocmask", "timer_create", "setitimer", "alarm",
    "tgkill", "clone3", "unshare", "setns", "futex", "sched_yield", "sched_setaffinity", "sched_getaffinity",
    "sched_getcpu", "getcpu",
    # loader
    "dlopen", "dlmopen", "dlsym", "dlvsym", "dladdr", "dladdr1", "dlclose", "dlinfo", "getauxval", "backtrace",
    "_r_debug", "_GLOBAL_OFFSET_TABLE_", "_DYNAMIC", "_end", "__ehdr_start", "__executable_start",
    # the launcher's own exports: a kernel is called, it calls nobody
    "TVMFFIFunctionGetGlobal", "TVMFFIFunctionSetGlobal", "TVMFFIFunctionCall", "TVMFFIFunctionCreate",
    "TVMFFIEnvRegisterCAPI", "TVMFFIEnvModLookupFromImports", "TVMFFIHandleInitOnce",
}  # fmt: skip
_PATTERNS = (
    re.compile(r"pthread_\w+|thrd_\w+|mtx_\w+|cnd_\w+|sem_\w+|dl_\w+|__dl_\w+|sys_\w+|SYS_\w+|__NR_\w+|io_uring\w*"),
    re.compile(r"_?_?(?:rdtscp?|rdpmc|rdrand\d*(?:_step)?|rdseed\d*(?:_step)?|rdpid(?:_u32)?|rdpru|cpuid\w*|cpuidex|xgetbv|xsetbv)(?:_u\d+)?"),
    re.compile(r"_(?:read|write)[fg]sbase_u\d+|_xbegin|_xend|_xabort|_xtest|_tpause|_umwait|_umonitor|_wrpkru|_rdpkru_u32|_ptwrite\w*|_hreset|_enqcmds?"),
    re.compile(r"__builtin_(?:frame_address|return_address|extract_return_addr|frob_return_addr|apply\w*|return|longjmp|setjmp|unwind\w*|eh_\w+|init_dwarf\w*|dwarf\w*)"),
    re.compile(r"__builtin_(?:thread_pointer|set_thread_pointer|va_arg_pack\w*|alloca\w*|call_with_static_chain|nonlocal_goto|trap|abort|exit\w*|malloc|calloc|realloc|free)"),
    re.compile(r"__builtin_(?:printf\w*|fprintf\w*|puts\w*|putchar\w*|fputs\w*|fork|exec\w+|cpu_\w+|ia32_(?:rd|wr|xbegin|xend|xabort|cpuid|xgetbv|lwp|enqcmd|serialize|ptwrite|umonitor|umwait|tpause)\w*)"),
    re.compile(r"__(?:builtin_)?(?:init|fini)_?\w*|__(?:attribute|declspec)|__sync_\w+_lock\w*|__cxa_\w+|__gxx_\w+|_Unwind_\w+|__gcov\w*|__sanitizer\w*"),
)  # fmt: skip

CALLED_WORDS = frozenset({
    "open", "openat", "creat", "close", "read", "write", "pread", "pwrite", "readv", "writev", "lseek", "stat",
    "fstat", "ioctl", "fcntl", "dup", "dup2", "pipe", "socket", "connect", "bind", "listen", "accept", "send",
    "recv", "sendto", "recvfrom", "poll", "select", "epoll_create", "unlink", "rename", "remove", "mkdir", "chdir",
    "chmod", "chown", "mmap", "kill", "raise", "signal", "wait", "waitpid", "sleep", "time", "clock", "getpid",
    "gettid", "getppid", "getuid", "uname", "clone", "sysconf",
})  # fmt: skip
"""Words with an honest life of their own: refused only where they are called as free functions that the file does not
define itself."""


def forbidden_identifier(name: str) -> str | None:
    """Rule code that an identifier violates, or None."""
    if name in _ASM:
        return "scope.cpp_asm"
    if name in _STORAGE:
        return "scope.cpp_state"
    if name in _NAMES or name in _MODULES or name in _REPRODUCIBILITY or any(p.fullmatch(name) for p in _PATTERNS):
        return "scope.cpp_identifier"
    return None
