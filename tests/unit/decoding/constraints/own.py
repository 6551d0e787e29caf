"""Constraints as users write them, with nothing but the documented methods."""

from __future__ import annotations

from descant.decoding.constraints import Constraint


class Often(Constraint):
    """A token so many times, anywhere."""

    def __init__(self, token, times):
        self.token, self.times, self.count = token, times, 0
        super().__init__()

    def advance(self):
        return self.token if self.count < self.times else None

    def does_advance(self, token_id):
        return token_id == self.token and self.count < self.times

    def update(self, token_id):
        stepped = self.does_advance(token_id)
        self.count += stepped
        return stepped, self.count == self.times, False

    def reset(self):
        self.count = 0

    def remaining(self):
        return self.times - self.count

    def copy(self, stateful=False):
        new = type(self)(self.token, self.times)
        if stateful:
            new.count = self.count
        return new


class Words(Constraint):
    """A phrase that resets at a mismatch; `log` is every token read, in any copy."""

    def __init__(self, token_ids, log=None):
        self.token_ids, self.done = list(token_ids), 0
        self.log = []
        super().__init__()
        self.log = [] if log is None else log

    def advance(self):
        return self.token_ids[self.done] if self.remaining() else None

    def does_advance(self, token_id):
        return token_id == self.advance()

    def update(self, token_id):
        self.log.append(token_id)
        stepped = self.does_advance(token_id)
        self.done = self.done + 1 if stepped else 0
        return stepped, self.remaining() == 0, not stepped

    def reset(self):
        self.done = 0

    def remaining(self):
        return len(self.token_ids) - self.done

    def copy(self, stateful=False):
        new = Words(self.token_ids, self.log)
        if stateful:
            new.done = self.done
        return new
