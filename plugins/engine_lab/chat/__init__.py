"""``engine chat``: a conversation in the terminal.

``which`` finds an engine, ``own_server`` starts one where none runs, ``ask`` streams one answer, ``screen`` shows it
as it comes, with its speed below, ``summary`` and ``why`` say what it took, ``conversation`` holds the turns,
``commands`` what begins with a slash, ``prompt`` reads a message, and ``main`` puts them together.
"""
