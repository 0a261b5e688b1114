"""Run ``.gguf`` files on llama.cpp.

Each model has a separate process, for four measured reasons: llama.cpp's bindings hold the GIL while they load and
unload (0.6 to 30 s in which no notebook, server or panel would run); a failed load prints its reason only on standard
error; a crash in native code ends that process and not the kernel; and the end of a process releases all of its memory.
The engine communicates with it by HTTP over a UNIX socket in a private folder.
"""
