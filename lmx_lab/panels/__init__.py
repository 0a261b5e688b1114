"""Widgets that show a lab and work on it: models, metrics, chat, rerank.

Each panel is a Python class and a plain JavaScript file beside it. ``workbench`` runs their Python on a thread of its
own, ``source`` is the seam to the lab that they show.
"""
