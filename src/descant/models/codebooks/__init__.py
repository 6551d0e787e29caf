"""Models that predict several codebooks in a step: a row of the table is one codebook of one sequence."""
