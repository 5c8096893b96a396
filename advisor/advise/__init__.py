"""Advice: run the rules, estimate their gains, rank the findings and write the report."""
