"""What starts and watches processes: the command line, supervision, fleets, the offline API."""
