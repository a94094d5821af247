"""Where the drafts of a round come from, as numbers that kernels and the host share.

Of each kind another share is accepted. FROM_BRANCH: the outcome was predicted. FROM_FALLBACK:
drafted once the outcome was there. LEFT_OVER: drafted for an earlier round that had more drafts
than were verified. GUESSED: from the text alone (``guess.py``).
"""

FROM_BRANCH, FROM_FALLBACK, LEFT_OVER, GUESSED = range(4)
KINDS = 4
