"""Reader of Nsight Systems."""
