"""What the routes of both servers, the lab's and the daemon's, have in common: bodies, errors, documents, CORS, ids."""
