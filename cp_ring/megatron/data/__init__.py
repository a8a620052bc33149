"""The data of a job: documents and masks of its microbatches, their order, and work done ahead."""
