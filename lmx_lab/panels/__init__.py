"""Widgets that show a lab and control it: models, metrics, chat, rerank, and a daemon's events.

A panel is a Python class, a plain JavaScript file and a style sheet of the same name, and a row in ``layout.PANELS``.
``workbench`` runs the Python of all panels in a thread of its own; they use a lab through ``lmx_lab.backend.Backend``.
"""
