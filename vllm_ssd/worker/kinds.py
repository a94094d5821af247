"""Where the drafts of a round come from, as numbers that kernels and the host share.

Of each kind another share is accepted. FROM_BRANCH: the outcome was predicted. FROM_FALLBACK:
drafted once the outcome was there. FROM_SIBLING: a bonus was predicted at the outcome's accepted
length, but another one; its branch is taken for want of anything better. LEFT_OVER: drafted for an
earlier round that had more drafts than were verified. GUESSED: from the text alone
(``guess_kernels.py``).
"""

FROM_BRANCH, FROM_FALLBACK, FROM_SIBLING, LEFT_OVER, GUESSED = range(5)
KINDS = 5
