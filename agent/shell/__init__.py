"""What shells and man(1) want to know of the command line, made from its parser."""
