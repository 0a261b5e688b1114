"""The engine on llama.cpp, for ``.gguf`` files.

Each model has a process of its own, for four measured reasons: llama.cpp's bindings hold Python's lock while they load
and unload (0.6 to 30 s in which no notebook, server or panel would run); a failed load gives its reason only on
standard error; a crash in native code ends that process and not the kernel; and the end of a process releases all of
its memory. This process speaks HTTP with it, over a UNIX socket in a private folder.
"""
