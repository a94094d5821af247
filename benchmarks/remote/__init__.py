"""Another node on this machine, for a draft whose target is here."""
