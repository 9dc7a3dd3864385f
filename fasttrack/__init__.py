"""The command line: wires the packages below together and holds no logic of its own."""
