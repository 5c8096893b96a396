"""Pages, a module each: ``layout(**query)``, and ``register(app, session)`` if it has callbacks."""
