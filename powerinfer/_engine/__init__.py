"""The engine in Python: the binding, models, sessions, devices, and the loops that make tokens."""
