"""Work for many threads and processes: cuts for all of them, and what each process gets."""
