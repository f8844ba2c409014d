"""The engine in Python: the binding, models, sessions, devices, requests and the loop that computes them."""
