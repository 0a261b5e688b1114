"""Labs for notebooks and programs: launch one, attach to one, and use it through ``Lab``.

``Lab`` sends its requests through a ``lmx_lab.backend.Backend``: the one in ``local`` calls the server of this process,
the one in ``remote`` uses HTTP. The two modules also start and stop the server or the connection. ``launcher`` decides
which lab ``launch()`` starts, returns or replaces.
"""
