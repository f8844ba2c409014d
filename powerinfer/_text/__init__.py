"""Text: tokenizers, chat templates, grammars, tool calls, and answers made of tokens."""
