"""The LoCoMo benchmark for memory of long conversations: data, systems under test, metrics, report."""
