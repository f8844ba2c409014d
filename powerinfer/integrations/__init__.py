"""Plugins for other programs: `llm`, Ray."""
