"""How a front end reaches engine cores: in this process or in processes of their own."""
