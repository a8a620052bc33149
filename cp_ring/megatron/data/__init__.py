"""The data of a job: documents and masks of its microbatches, and their order."""
