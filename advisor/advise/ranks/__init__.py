"""A job of many ranks: each is measured where its file is, and tells a bounded summary."""
