"""Data of a job: documents and masks of its microbatches, their order, and what is read ahead."""
