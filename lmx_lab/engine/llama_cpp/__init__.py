"""The engine on llama.cpp, for ``.gguf`` files.

Each model is held by a process of its own, for four measured reasons: llama.cpp's bindings hold the interpreter's lock
while they load and unload (0.6 to 30 s in which no notebook, server or panel would move); a failed load says why only
on its standard error; a crash in native code ends that process and not the kernel; and its end gives all memory back.
We speak to it as any client does, over a UNIX socket in a private folder.
"""
