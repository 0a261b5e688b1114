"""Widgets that show a lab and control it: models, metrics, chat, rerank, and a daemon's events.

A panel consists of a Python class, a plain JavaScript file and a style sheet of the same name, and an entry in
``layout.PANELS``. ``workbench`` runs the Python code of all panels in one thread; they use a lab through
``lmx_lab.backend.Backend``.
"""
