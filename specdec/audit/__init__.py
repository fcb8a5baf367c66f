"""Audit: an answer as a file (a receipt), and its proof by replay.

`receipt` is the file's form, `making` writes one, `digests` names weights by content; the server
and the door use these. `identity` describes a loaded model, `replay` feeds claimed ids to an
engine, `verify` reads files and judges them.
"""
