"""Keys in the metadata of payloads that say whether they were encrypted, and have to be."""

SEALED = "relaunch-sealed"
"""Of a payload that this process has decrypted; never of one that was stored so."""
REQUIRED = "relaunch-required"
"""Of a payload within what is encrypted: its writer takes no other."""
