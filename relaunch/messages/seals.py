"""Keys in the metadata of payloads that say whether they were encrypted, and have to be."""

from datetime import timedelta

SEALED = "relaunch-sealed"
"""Of a payload that this process has decrypted; never of one that was stored so."""
REQUIRED = "relaunch-required"
"""Of a payload within what is encrypted: its writer takes no other."""
PLAIN_PAYLOAD = "PlainPayload"
"""Type of failures: something was not encrypted that has to be. It never ends a job."""
ORDER_AGAIN = timedelta(seconds=2)
"""Until an activity is ordered again whose answer was refused. Someone who answers each time cannot
fill a history faster."""
PLAIN_RESULT = (
    "its result is not encrypted, and only encrypted ones are taken here"
    " (RELAUNCH_ENCRYPTION_REQUIRED): a worker without the keys of this namespace gave it"
)
