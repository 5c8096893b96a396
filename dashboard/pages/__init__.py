"""One module a page: ``layout(**query)``, and ``register(app, session)`` if it has callbacks."""
