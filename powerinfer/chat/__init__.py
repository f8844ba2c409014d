"""The chat in the terminal: `python -m powerinfer.chat [MODEL]` or `powerinfer chat [MODEL]`.

conversation.py   what was said, and the settings; saved and loaded as JSON
commands.py       /help and its siblings
ui.py             reading a line, showing an answer: terminal or pipe
wrap.py           breaking lines between words while an answer streams
chat.py           answering a question in a conversation
repl.py           the loop
"""
