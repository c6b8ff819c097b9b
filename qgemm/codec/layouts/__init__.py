"""Word layouts of device tiles that several formats share."""
