"""Analysis of a job of many ranks: each is measured where its file is, in a bounded summary."""
