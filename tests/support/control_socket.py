"""A control socket with nobody at its other end."""


class Sent(list):
    """The messages that were sent; ``full``: the queue has no room for more."""

    full = False

    def send(self, message) -> bool:
        if not self.full:
            self.append(message)
        return not self.full

    def reconnect(self) -> None:
        """Nobody is at the other end of the next one either."""
