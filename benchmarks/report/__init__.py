"""What results files say: tables of the documents, plots, targets beside measured numbers."""
