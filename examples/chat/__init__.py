"""``python -m examples.chat``: a chat in the terminal that shows how fast the server is."""
