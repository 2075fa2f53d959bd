"""Publishing: brings the trained weights into the engines, and verifies that they compute with them.

`serving` is the loop's interface to the engines. `publish` makes one sync, `delta_syncs` decides whether it sends only
changes, and `verification` compares log-probs. `colocation` lets engine and models take turns on the same devices.
"""
