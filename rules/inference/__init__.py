"""Rules about models that an inference engine serves: one file a question."""
