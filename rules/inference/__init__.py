"""Rules about models that an inference engine serves: one file per question."""
