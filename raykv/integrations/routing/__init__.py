"""Chooses the engine that can answer a request soonest. Needs no engine and no Ray; see `docs/routing.md`."""
