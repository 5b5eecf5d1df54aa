"""What a teacher is worth, measured on recorded episodes before anything is trained."""
