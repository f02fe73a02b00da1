"""Workers in processes of their own, one for each rank of a model."""
