"""Workers of jobs: in this process, in processes of their own, and on Ray."""
