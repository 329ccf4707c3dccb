"""The papers' experiments, to be run again: values, a queue that goes on, records, verdicts."""
