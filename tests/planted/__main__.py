from tests.planted.plant import main

if __name__ == "__main__":
    main()
